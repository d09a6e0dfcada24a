"""Everything that knows Megatron: flags, attaching the offloader, the worker, data, the CPU device."""
