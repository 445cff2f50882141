"""Drop-ins for other libraries. A module imports its library only when it is used.

There is one for each: `trl`, `verl`, `openrlhf`, `nemo_rl`, `liger`, `torchrl`; and `transformers`,
on which TRL's and the training loops build. They share `formulas`; `support`, the rules of options;
`replacing`, for functions of a library, and `importing`, to act when a library is imported.
"""
