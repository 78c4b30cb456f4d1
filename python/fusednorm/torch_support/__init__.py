"""What torch wants beside operators: the library loaded, DTensor rules, decompositions, recomputation."""
