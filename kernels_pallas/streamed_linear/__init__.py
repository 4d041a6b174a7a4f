"""Few rows times large weights, with the norm, gates and residual around: what a decoding step spends its time on."""

from kernels_pallas.streamed_linear.api import BACKENDS as BACKENDS
from kernels_pallas.streamed_linear.api import streamed_linear as streamed_linear
from kernels_pallas.streamed_linear.api import supports as supports
from kernels_pallas.streamed_linear.contract import PLAIN as PLAIN
from kernels_pallas.streamed_linear.contract import Backend as Backend
from kernels_pallas.streamed_linear.contract import Form as Form
from kernels_pallas.streamed_linear.contract import Problem as Problem
