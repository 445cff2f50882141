"""`fastrl bench`: fastrl beside its alternatives on this machine. See `fastrl bench --help`."""
