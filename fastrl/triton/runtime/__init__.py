"""Registration of the operators, the interpreter, and targets of ahead-of-time compilation."""
