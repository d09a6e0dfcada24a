class Float16OptimizerWithFloat16Params:
    pass
