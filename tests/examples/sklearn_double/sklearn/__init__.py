"""Stands in for scikit-learn, which the tests do not install."""
