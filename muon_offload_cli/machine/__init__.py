"""Facts about this machine: filesystems, memory limits, devices. Imports no torch."""
