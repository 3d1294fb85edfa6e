"""The models of the methods: ordinary torch modules with their losses and example batches."""
