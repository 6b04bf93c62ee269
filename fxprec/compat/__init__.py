"""All code that depends on torch's or Triton's version or private names: torch 2.11 to 2.15, Triton 3.6 to 3.9."""

from __future__ import annotations

from fxprec.compat.allocations import LiveBytes as LiveBytes
from fxprec.compat.allocations import NotReplayedError as NotReplayedError
from fxprec.compat.allocations import fakes_like as fakes_like
from fxprec.compat.allocations import replayed as replayed
from fxprec.compat.allocations import storage_bytes as storage_bytes
from fxprec.compat.allocations import storages_of as storages_of
from fxprec.compat.ambient import Ambient as Ambient
from fxprec.compat.ambient import FakeTensor as FakeTensor
from fxprec.compat.ambient import FakeTensorMode as FakeTensorMode
from fxprec.compat.ambient import current_fake_mode as current_fake_mode
from fxprec.compat.ambient import fake_mode_of as fake_mode_of
from fxprec.compat.ambient import real_tensors as real_tensors
from fxprec.compat.ambient import size_guards as size_guards
from fxprec.compat.ambient import symbol_of as symbol_of
from fxprec.compat.ambient import tracing_with as tracing_with
from fxprec.compat.ambient import unset_fake_temporarily as unset_fake_temporarily
from fxprec.compat.autograd import CHECKED as CHECKED
from fxprec.compat.autograd import backward_at_once as backward_at_once
from fxprec.compat.autograd import backward_id as backward_id
from fxprec.compat.autograd import below_autograd as below_autograd
from fxprec.compat.autograd import checkpoint_around as checkpoint_around
from fxprec.compat.autograd import hand_on_sources as hand_on_sources
from fxprec.compat.autograd import in_backward as in_backward
from fxprec.compat.autograd import inputs_written_behind as inputs_written_behind
from fxprec.compat.autograd import is_profiling as is_profiling
from fxprec.compat.autograd import keeps_graph as keeps_graph
from fxprec.compat.autograd import on_gradient as on_gradient
from fxprec.compat.autograd import take_donated as take_donated
from fxprec.compat.autograd import will_run as will_run
from fxprec.compat.autograd import without_source as without_source
from fxprec.compat.autograd import without_torch_function as without_torch_function
from fxprec.compat.backends import cause_of_no_code as cause_of_no_code
from fxprec.compat.backends import compile_lock as compile_lock
from fxprec.compat.backends import forget_name as forget_name
from fxprec.compat.backends import hear_resets as hear_resets
from fxprec.compat.backends import is_looking_up_a_backend as is_looking_up_a_backend
from fxprec.compat.backends import name_backend as name_backend
from fxprec.compat.backends import one_at_a_time as one_at_a_time
from fxprec.compat.backends import through_dynamo as through_dynamo
from fxprec.compat.backends import wrapper_of as wrapper_of
from fxprec.compat.bit_loops import packs_in_loops as packs_in_loops
from fxprec.compat.budget import annotate_budget as annotate_budget
from fxprec.compat.budget import keep_random_numbers as keep_random_numbers
from fxprec.compat.budget import memory_budget as memory_budget
from fxprec.compat.callers import TraceAgain as TraceAgain
from fxprec.compat.callers import calling_wrapper as calling_wrapper
from fxprec.compat.callers import ends_in_break as ends_in_break
from fxprec.compat.callers import traced_model as traced_model
from fxprec.compat.callers import widen_ddp_buckets as widen_ddp_buckets
from fxprec.compat.captured import ATTENTION as ATTENTION
from fxprec.compat.captured import bodies_traced_in_place as bodies_traced_in_place
from fxprec.compat.captured import copied as copied
from fxprec.compat.captured import gradients_within as gradients_within
from fxprec.compat.captured import grouped_mm as grouped_mm
from fxprec.compat.captured import is_grouped_mm as is_grouped_mm
from fxprec.compat.compiler import NO_CXX_COMPILER as NO_CXX_COMPILER
from fxprec.compat.compiler import cxx_compiler as cxx_compiler
from fxprec.compat.compiler import no_compiler as no_compiler
from fxprec.compat.cuda_memory import allocated as allocated
from fxprec.compat.cuda_memory import cublas_workspace_bytes as cublas_workspace_bytes
from fxprec.compat.cuda_memory import cuda_block_bytes as cuda_block_bytes
from fxprec.compat.frames import LEAVES_RECURRENT as LEAVES_RECURRENT
from fxprec.compat.frames import LIMITS_LOST as LIMITS_LOST
from fxprec.compat.frames import Compilations as Compilations
from fxprec.compat.groups import gathered_dtypes as gathered_dtypes
from fxprec.compat.groups import process_group_store as process_group_store
from fxprec.compat.groups import sharded_parameters as sharded_parameters
from fxprec.compat.inductor import FORCE_STRIDES as FORCE_STRIDES
from fxprec.compat.inductor import ROUNDED_AT_EVERY_OPERATOR as ROUNDED_AT_EVERY_OPERATOR
from fxprec.compat.inductor import SEEDED_RANDINT as SEEDED_RANDINT
from fxprec.compat.inductor import SEEDED_RANDOM as SEEDED_RANDOM
from fxprec.compat.inductor import GraphPass as GraphPass
from fxprec.compat.inductor import boxed as boxed
from fxprec.compat.inductor import build_cpp as build_cpp
from fxprec.compat.inductor import cache_folder as cache_folder
from fxprec.compat.inductor import channels_last_strides as channels_last_strides
from fxprec.compat.inductor import code_keyed_by as code_keyed_by
from fxprec.compat.inductor import compile_fx as compile_fx
from fxprec.compat.inductor import compile_fx_inner as compile_fx_inner
from fxprec.compat.inductor import decompositions as decompositions
from fxprec.compat.inductor import forget_mutation_regions as forget_mutation_regions
from fxprec.compat.inductor import hand_on_inputs as hand_on_inputs
from fxprec.compat.inductor import lies_in_memory as lies_in_memory
from fxprec.compat.inductor import makes_cuda_graphs as makes_cuda_graphs
from fxprec.compat.inductor import mode_settings as mode_settings
from fxprec.compat.inductor import takes_approximate_logarithm as takes_approximate_logarithm
from fxprec.compat.inductor import trim_output_strides as trim_output_strides
from fxprec.compat.inductor import unwritable_cache as unwritable_cache
from fxprec.compat.inductor import waits_for_collectives as waits_for_collectives
from fxprec.compat.inductor import whole_gemms as whole_gemms
from fxprec.compat.inductor import writes_after_reading as writes_after_reading
from fxprec.compat.inductor import writes_in_place as writes_in_place
from fxprec.compat.loop_calls import call_in_loop as call_in_loop
from fxprec.compat.loop_calls import calls_in_loops as calls_in_loops
from fxprec.compat.loop_calls import converted_in_loop as converted_in_loop
from fxprec.compat.loop_calls import lower_pointwise as lower_pointwise
from fxprec.compat.partition import Halves as Halves
from fxprec.compat.partition import Partitioner as Partitioner
from fxprec.compat.partition import cut as cut
from fxprec.compat.partition import min_cut as min_cut
from fxprec.compat.partition import without_effect as without_effect
from fxprec.compat.patches import optional as optional
from fxprec.compat.processor import cpu_vectors as cpu_vectors
from fxprec.compat.processor import emulates_bf16 as emulates_bf16
from fxprec.compat.processor import has_cpu_gemm as has_cpu_gemm
from fxprec.compat.profiles import allocated_peak as allocated_peak
from fxprec.compat.profiles import peak_bytes as peak_bytes
from fxprec.compat.raised import cause_of as cause_of
from fxprec.compat.raised import quiet_fakes as quiet_fakes
from fxprec.compat.raised import users_line as users_line
from fxprec.compat.random_numbers import draw_of as draw_of
from fxprec.compat.random_numbers import draws_where_read as draws_where_read
from fxprec.compat.sizes import guessed_sizes as guessed_sizes
from fxprec.compat.sizes import traced_size as traced_size
from fxprec.compat.stored import constant_places_are_arguments as constant_places_are_arguments
from fxprec.compat.stored import loops_share_files as loops_share_files
from fxprec.compat.stored import storable as storable
from fxprec.compat.stored import stored_autograd as stored_autograd
from fxprec.compat.stored import traced_facts as traced_facts
from fxprec.compat.trace import debug_folder as debug_folder
from fxprec.compat.trace import trace_artifact as trace_artifact
from fxprec.compat.trace import traces_artifacts as traces_artifacts
from fxprec.compat.trace import untraced as untraced
from fxprec.compat.tree import keystr as keystr
from fxprec.compat.tree import tree_flatten_with_path as tree_flatten_with_path
from fxprec.compat.tree import tree_leaves as tree_leaves
from fxprec.compat.tree import tree_map_only as tree_map_only
from fxprec.compat.triton import OLDEST_WITH_FP8 as OLDEST_WITH_FP8
from fxprec.compat.triton import TritonCalls as TritonCalls
from fxprec.compat.triton import compile_triton as compile_triton
from fxprec.compat.triton import current_architecture as current_architecture
from fxprec.compat.triton import kernel_running as kernel_running
from fxprec.compat.triton import load_kernel as load_kernel
from fxprec.compat.triton import no_native_fp8 as no_native_fp8
from fxprec.compat.triton import no_triton as no_triton
from fxprec.compat.triton import refused_gpu as refused_gpu
from fxprec.compat.triton import runs_in_interpreter as runs_in_interpreter
from fxprec.compat.triton import triton_interprets as triton_interprets
from fxprec.compat.triton import triton_tool as triton_tool
from fxprec.compat.triton import why_not_started as why_not_started
from fxprec.compat.versions import MAXIMUM_KEEPS_NAN as MAXIMUM_KEEPS_NAN
from fxprec.compat.versions import newer_than_tried as newer_than_tried
from fxprec.compat.versions import torch_version as torch_version

bitcasts_in_loops = optional("fxprec.compat.bitcasts", "bitcasts_in_loops", "bits are read one by one, slower")
only_tensors_are_loads = optional("fxprec.compat.loads", "only_tensors_are_loads", "a GPU's kernels are fused less")
saving_memory = optional("fxprec.compat.order", "saving_memory", "Inductor orders kernels, at a higher peak")
tiles_for_bytes = optional("fxprec.compat.tiling", "tiles_for_bytes", "loops over 8-bit codes on a CPU are slower")
converting_fakes = optional(
    "fxprec.compat.conversions", "converting_fakes", "a factory's conversion of its model takes needless time"
)
recompiles_per_model = optional("fxprec.compat.frames", "recompiles_per_model", LIMITS_LOST)
frames_left_uncompiled = optional(
    "fxprec.compat.frames", "frames_left_uncompiled", "no warning names code that runs uncompiled"
)
calls_inside_modes = optional(
    "fxprec.compat.modes",
    "calls_inside_modes",
    "code that first runs inside a dispatch mode stays uncompiled, silently",
)
torchs_modules_in_place = optional(
    "fxprec.compat.in_place", "torchs_modules_in_place", "module.compile() compiles no module of a class of torch's"
)
suppressed_errors = optional(
    "fxprec.compat.suppressed",
    "suppressed_errors",
    "torch._dynamo.config.suppress_errors also suppresses fxprec's errors",
)
graph_breaks = optional("fxprec.compat.frames", "graph_breaks", "no event names code that is compiled in pieces")
