"""Runs action plugins that decide on the controller. They get no variables where a test gives none, so they cannot read any."""

from unittest import mock


def made(plugin, *, check_mode=False, **arguments):
    """The action of a task with these arguments."""
    task = mock.Mock(args=arguments, async_val=0, check_mode=check_mode, action=plugin.__name__.rpartition(".")[2])
    play_context = mock.Mock(password=None, become_pass="")
    return plugin.ActionModule(task, mock.Mock(), play_context, *(mock.Mock() for _argument in range(3)))


def run(plugin, task_vars=None, **arguments):
    """What the action returns."""
    return made(plugin, **arguments).run(task_vars=task_vars or {})
