"""For property-based tests of draft lengths: an exact toy model, strategies, an oracle, checks of the books."""
