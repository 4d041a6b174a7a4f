"""Files to weights and back: Hugging Face safetensors and Orbax, checked tensor by tensor."""

from mtp_jax.checkpoints.errors import CheckpointError as CheckpointError
from mtp_jax.checkpoints.folders import bundled_path as bundled_path
from mtp_jax.checkpoints.load import LoadedModel as LoadedModel
from mtp_jax.checkpoints.load import load_model as load_model
