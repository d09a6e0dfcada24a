def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--recompute-granularity")
    return parser


def parse_and_validate_args():
    raise NotImplementedError
