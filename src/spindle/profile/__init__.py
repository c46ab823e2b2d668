"""Times and memory of layers on n devices, and costs of links: measured, or computed from FLOPs and bytes."""

from spindle.profile.abstract import abstract_profile
from spindle.profile.communication import all_reduce_s, all_to_all_s, collective_latency_s, ring_bytes
from spindle.profile.curve import Contention, Curve, SmTimes
from spindle.profile.efficiency import EFFICIENCIES_KIND, AttentionTable, Efficiencies, GemmColumn, MemoryTable
from spindle.profile.file import profile_for_graph, read_profile, write_profile
from spindle.profile.host import HostOverhead
from spindle.profile.items import ItemTimes
from spindle.profile.memory import backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.profile.operators import Attention, Collective, Gemm, LayerOperators, MemoryBound, Operator, Pass
from spindle.profile.profile import Profile, Setting
from spindle.profile.roofline import Roofline, roofline_profile
from spindle.profile.samples import LayerSamples, curve_from_samples, sampled_profile
from spindle.profile.semu import Semu

__all__ = [
    "EFFICIENCIES_KIND",
    "Attention",
    "AttentionTable",
    "Collective",
    "Contention",
    "Curve",
    "Efficiencies",
    "Gemm",
    "GemmColumn",
    "HostOverhead",
    "ItemTimes",
    "LayerOperators",
    "LayerSamples",
    "MemoryBound",
    "MemoryTable",
    "Operator",
    "Pass",
    "Profile",
    "Roofline",
    "Semu",
    "Setting",
    "SmTimes",
    "abstract_profile",
    "all_reduce_s",
    "all_to_all_s",
    "backward_bytes",
    "bytes_text",
    "collective_latency_s",
    "curve_from_samples",
    "profile_for_graph",
    "read_profile",
    "ring_bytes",
    "roofline_profile",
    "sampled_profile",
    "saved_bytes",
    "state_bytes",
    "write_profile",
]
