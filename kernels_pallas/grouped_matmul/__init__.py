"""Rows times the weights of their expert: what a mixture of experts does after it has sorted its tokens."""

from kernels_pallas.grouped_matmul.api import BACKENDS as BACKENDS
from kernels_pallas.grouped_matmul.api import grouped_matmul as grouped_matmul
from kernels_pallas.grouped_matmul.api import supports as supports
from kernels_pallas.grouped_matmul.contract import Backend as Backend
from kernels_pallas.grouped_matmul.contract import Problem as Problem
