"""Hints for people who come from TRL, peft, verl, OpenRLHF or NeMo-RL, from the keys and values in `keys.yaml`."""
