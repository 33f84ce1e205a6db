"""Runs action plugins that decide on the controller. They get no variables, so they cannot read any."""

from unittest import mock


def run(plugin, *, check_mode=False, **arguments):
    """What the action returns."""
    task = mock.Mock(args=arguments, async_val=0, check_mode=check_mode, action=plugin.__name__.rpartition(".")[2])
    return plugin.ActionModule(task, *(mock.Mock() for _argument in range(5))).run(task_vars={})
