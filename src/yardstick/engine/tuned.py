"""What was measured to be fastest, by device: the `tuned` of `bench/gpu_check.py`, entries of `choose.Entry`.

No device is in it yet. It is Python, so that a change of it reruns what it decides.
"""

TUNED: dict[str, list[dict]] = {}
