from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

HAVE_EMERGING_OPTIMIZERS = True


class TensorParallelMuon(OrthogonalizedOptimizer):
    pass
