"""A vocabulary that is split over the ranks of a process group."""
