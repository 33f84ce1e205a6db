"""Holds the buffers that llama-server tells of against a placement."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load

SLACK = 0.021
"""MiB by which a few lines of a log, each rounded to two digits after the point, may be wrong together."""
PACKING = 4 / 38
"""The largest share of an AMX buffer that is no weights: with each block of q8_0 (34 bytes), AMX keeps a sum of 4 bytes. Of other types it
is less, of f16 nothing."""


def compared(placed, found):
    """What differs, a line each. Every buffer that is not of a placed device is the head's processor's: CPU, AMX, CPU_REPACK and the like."""
    expected = {device.buffer: share for device, share in zip(placed.devices, placed.shares())}
    wrong = []
    host = {"model": 0.0, "KV": 0.0}
    for device, sizes in found.items():
        share = expected.get(device)
        if share is None:
            host = {kind: told + sizes.get(kind, 0.0) for kind, told in host.items()}
            continue
        wrong += _differing(device, sizes, share)
        compute = sizes.get("compute", 0.0)
        if compute > placed.load.compute / device_load.MIB + SLACK:
            wrong.append(
                f"{device} compute: logged {compute}, planned at most {placed.load.compute / device_load.MIB:.3f}"
            )
    packed = found.get("AMX", {}).get("model", 0.0)
    wrong += _differing("CPU", host, placed.head_share(), (packed + SLACK) * PACKING)
    absent = [device for device, share in expected.items() if share.weights + share.kv and device not in found]
    return wrong + [f"{device} is not in the log" for device in absent]


def _differing(device, sizes, share, more=0.0):
    """:param more: MiB that the model may take on top."""
    wrong = []
    for kind, size, above in (("model", share.weights, more), ("KV", share.kv, 0.0)):
        told, mib = sizes.get(kind, 0.0), size / device_load.MIB
        if not mib - SLACK <= told <= mib + SLACK + above:
            wrong.append(f"{device} {kind}: logged {told:.2f}, planned {mib:.3f}")
    return wrong
