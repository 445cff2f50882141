"""Score centering: the sampler's expected score, subtracted from that of the sampled token."""
