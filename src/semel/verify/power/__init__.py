"""A disk that forgets what was not synced when its power is cut: for `semel verify --faults power`, and for tests.

forgetful.py   what is durable and what is not, and what a power cut leaves: pure
mount.py       the same as a file system (FUSE), in a process of its own
disk.py        mount it, cut its power, give it back
"""
