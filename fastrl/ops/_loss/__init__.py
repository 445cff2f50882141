"""Inputs of the policy losses: constants, the weights of each term, slopes per token."""
