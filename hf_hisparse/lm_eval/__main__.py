"""lm-eval's own program, with the model type `hisparse`: `python -m hf_hisparse.lm_eval --model hisparse ...`."""

from lm_eval.__main__ import cli_evaluate

import hf_hisparse.lm_eval as hf_hisparse_lm_eval  # noqa: F401 (registers the model type)


if __name__ == "__main__":
    cli_evaluate()
