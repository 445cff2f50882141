"""One run on several processes, its ranks: what they share, split, sum and agree on."""
