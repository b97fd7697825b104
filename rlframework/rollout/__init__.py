"""Episodes to training rows: prompts to the generation engine, completions to the environment."""
