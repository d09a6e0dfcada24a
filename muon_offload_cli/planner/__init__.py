"""What a run will put where: bytes by rank and tier, whether they fit, what a step waits for."""
