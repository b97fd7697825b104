"""Broken generation engines: each changes the input or the output of the sound one.

Mutants know the attached module or the loaded weights, and nothing else of the sound engine.
"""
