"""`scripts/device-check`: whether modules on a device keep their promises on this machine.

It is for a GPU that somebody lends for minutes: one command, nothing to install, a line for each
promise. On a simulated device it checks itself, and what needs no GPU.

Files: `checks` is what a check is, `place` the device and its coordinator, `models` what is loaded;
the others have the checks.
"""
