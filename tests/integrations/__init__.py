"""A package, else pytest would put this folder on the path, and the folder `verl` would be verl."""
