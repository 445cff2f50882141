"""The models of a run: loaded, adapted, recomputed, kept."""
