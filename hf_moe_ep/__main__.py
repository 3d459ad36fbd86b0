"""`python -m hf_moe_ep` is the command `hf-moe-ep`; `accelerate launch -m hf_moe_ep doctor`."""

import sys

from hf_moe_ep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
