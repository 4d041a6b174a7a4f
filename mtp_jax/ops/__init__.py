"""Array operations shared by models and steps: attention call, page writes, sampling, collectives."""
