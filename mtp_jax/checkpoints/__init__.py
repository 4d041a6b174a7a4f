"""Files to weights and back: Hugging Face safetensors and Orbax, checked tensor by tensor."""

from mtp_jax.checkpoints.convert import save_hf_model as save_hf_model
from mtp_jax.checkpoints.convert import save_orbax_model as save_orbax_model
from mtp_jax.checkpoints.convert import write_hf as write_hf
from mtp_jax.checkpoints.drafter import add_drafter as add_drafter
from mtp_jax.checkpoints.errors import CheckpointError as CheckpointError
from mtp_jax.checkpoints.folders import bundled_names as bundled_names
from mtp_jax.checkpoints.folders import bundled_path as bundled_path
from mtp_jax.checkpoints.load import LoadedModel as LoadedModel
from mtp_jax.checkpoints.load import load_model as load_model
from mtp_jax.checkpoints.orbax_io import restore_weights as restore_weights
from mtp_jax.checkpoints.orbax_io import save_weights as save_weights
