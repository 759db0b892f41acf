"""What `weight-cache doctor` looks at: one function for each thing that a host allows or does not.

Rules:

- A probe says what it found and what to do about it; it never raises for what a host lacks.
- What can be tried without harm is tried. /proc and /sys are read for what cannot be, and for the
  figures behind an answer.
- What a probe makes is gone when it returns. It takes 4 MiB of memory at most, and none where that
  could end somebody: in a full memory cgroup the kernel kills, it does not refuse.
- `root` is where /proc, /sys, /dev and the cgroups are looked for; for tests.
"""
