def pretrain_cfg_container_from_args(args):
    raise NotImplementedError
