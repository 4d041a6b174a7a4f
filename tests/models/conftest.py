collect_ignore = ["record_dense_goldens.py"]  # imports torch, which is not a dependency
