"""Run the command `hf-moe-ep` as `python -m hf_moe_ep` or `accelerate launch -m hf_moe_ep`."""

import sys

from hf_moe_ep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
