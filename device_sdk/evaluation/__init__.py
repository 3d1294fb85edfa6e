"""How good a model is, as statistics that add up over devices: both ends compute with these."""
