"""An example of each kind of plugin besides training backends."""
