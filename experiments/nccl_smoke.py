import os, sys, time, faulthandler, json
sys.path.insert(0, "tests")
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
faulthandler.dump_traceback_later(100, exit=True)
torch.cuda.set_device(0)
from spindle.run.world import join_world, Message
t=time.time()
world = join_world()
def mem():
    torch.cuda.synchronize(); dist.barrier(group=world.control)
    free,total=torch.cuda.mem_get_info(); return free/2**20
def say(*a):
    if rank==0: print(*a, flush=True)
say("joined", time.time()-t, torch.cuda.nccl.version(), torch.__version__)
m0=mem(); t=time.time(); world.everyone; m1=mem(); say("everyone comm", m0-m1, "MiB all ranks", time.time()-t)
for i in range(3):
    t=time.time(); ranks=tuple(range(size)); world._groups.pop(("sync",ranks),None); world.group("sync", ranks); m2=mem(); say("another world comm", m1-m2, time.time()-t); m1=m2
x=torch.ones(1<<22,device="cuda")
world.exchange([Message(x,(rank+1)%size)],[Message(torch.empty_like(x),(rank-1)%size)])
m2=mem(); say("after p2p", m1-m2); m1=m2
t=time.time()
for _ in range(10):
    world.exchange([Message(x,(rank+1)%size)],[Message(torch.empty_like(x),(rank-1)%size)])
torch.cuda.synchronize(); say("ring of 16 MB ms", (time.time()-t)*100)
import worlds
names=[("everything","plan 1"),("everything","paper"),*((f"random {s}", f"plan {s}") for s in range(int(sys.argv[1])))]
for name, plan in names:
    t=time.time()
    try:
        found = worlds.compare_steps(rank, size, name, plan, 7, 1.0 if "1" in name else 64e6, "cuda")
        say(name, plan, f"{found.gradient:.1e} {found.loss:.1e} captured {found.captured} not {found.without_graph}", f"{time.time()-t:.1f} s")
    except Exception as e:
        import traceback; traceback.print_exc(); sys.stderr.flush(); os._exit(1)
say("groups", len(world._groups))
os._exit(0)
