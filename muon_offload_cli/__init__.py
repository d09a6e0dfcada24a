"""Train Megatron models with Muon's optimizer state on node-local NVMe."""
