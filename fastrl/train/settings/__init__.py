"""The settings of a run, in groups of options; `fastrl.train.config` joins them for each loop."""
