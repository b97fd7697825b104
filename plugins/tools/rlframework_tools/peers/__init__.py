"""Keys and values of TRL, peft, verl, OpenRLHF and NeMo-RL, and what they are here; `docs/moving/` explains them."""
