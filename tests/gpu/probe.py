"""Which of the driver's means work under MPS: run by hand."""
import os, sys, time, mmap, signal, statistics
import torch, torch.distributed as dist
sys.path.insert(0, "src")
from spindle.run.driver import Driver
from spindle.run.board import make_memory, open_memory
from spindle.run.medium import _Allocation
import numpy as np
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.cuda.set_device(0)
x = torch.ones(10, device="cuda"); torch.cuda.synchronize()
d = Driver()
def say(*a):
    if rank == 0: print(*a, flush=True)
say("SMs", torch.cuda.get_device_properties(0).multi_processor_count, "mem", torch.cuda.mem_get_info())
if rank == 0:
    fd, mem, name = make_memory(1 << 16); box = [os.getpid(), fd]
else: box = [None, None]
dist.broadcast_object_list(box, 0)
if rank: mem = open_memory(box[0], box[1], 1 << 16)
words = np.frombuffer(mem, dtype=np.int64)
words_host = d.register(words.ctypes.data, 1 << 16)
# device flags
if rank == 0:
    p = d.allocate(1 << 21); h = [d.export(p)]
else: h = [None]
dist.broadcast_object_list(h, 0)
if rank: p = d.open(h[0])
flags_dev = p
t = torch.as_tensor(_Allocation(p, 1 << 21), device="cuda"); 
if rank == 0: t.zero_()
torch.cuda.synchronize(); dist.barrier()
s = torch.cuda.Stream(priority=-1); sp = s.cuda_stream
def pingpong(base, count):
    dist.barrier(); t0 = time.perf_counter()
    if rank < 2:
        for k in range(1, count + 1):
            if rank == 0:
                d.write_value(sp, base + 64, k); d.wait_values(sp, [(base + 128, k)])
            else:
                d.wait_values(sp, [(base + 64, k)]); d.write_value(sp, base + 128, k)
        s.synchronize()
    return (time.perf_counter() - t0) / count * 1e6
for nm, base in (("host words", words_host), ("device words", flags_dev)):
    try:
        say("pingpong", nm, "us per round trip", round(pingpong(base, 200), 2))
    except Exception as e: say("pingpong", nm, "FAILED", e)
dist.barrier()

other = torch.cuda.Stream()
with torch.cuda.stream(other): z = x + 2
y = x + 1; torch.cuda.synchronize()
def blocked(prio, count, new_kernel=False):
    streams = [torch.cuda.Stream(priority=prio) for _ in range(count)]
    w = 1024
    words[w] = 0
    for st in streams: d.wait_values(st.cuda_stream, [(words_host + 8 * w, 1)])
    import threading
    t0 = time.perf_counter()
    threading.Timer(1.0, lambda: words.__setitem__(w, 1)).start()
    if new_kernel: torch.erfinv(x)
    took = time.perf_counter() - t0
    y = x + 1; e = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(other): z = x + 2
    e2 = other.record_event()
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < 0.3 and not (e.query() and e2.query()): pass
    r = (e.query(), e2.query())
    torch.cuda.synchronize()
    time.sleep(1.0)
    return r if not new_kernel else took
if rank == 0:
    for prio in (-1, 0):
        print("connections", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), "priority", prio, "blocked streams -> (default, other) ran:", {c: blocked(prio, c) for c in (1, 2, 4, 8)}, flush=True)
    print("first launch of a kernel while a stream waits took", blocked(-1, 1, True), "s of 1.0", flush=True)
dist.barrier()
