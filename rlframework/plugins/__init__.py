"""How parts are found and chosen: hookspecs, the records that plugins return, and the manager."""
