"""Paged attention with several query rows a sequence, for grouped and for latent (MLA) keys and values."""

from kernels_pallas.paged_attention.api import BACKENDS as BACKENDS
from kernels_pallas.paged_attention.api import check_static as check_static
from kernels_pallas.paged_attention.api import paged_attention as paged_attention
from kernels_pallas.paged_attention.api import select_backend as select_backend
from kernels_pallas.paged_attention.api import supports as supports
from kernels_pallas.paged_attention.contract import Backend as Backend
from kernels_pallas.paged_attention.contract import PagedAttentionConfig as PagedAttentionConfig
from kernels_pallas.paged_attention.contract import Problem as Problem
