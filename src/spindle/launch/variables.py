"""Environment variables through which a launcher communicates with its ranks."""

LAUNCHER = "SPINDLE_LAUNCHER"  # the pid of the launcher
PRELUDE = "SPINDLE_PRELUDE"  # `package.module:function` to call before the script
REPORTS = "SPINDLE_REPORTS"  # the descriptor of the pipe for a failure report
STORE = "SPINDLE_STORE"  # the file through which ranks find each other
ACTIVITY = "SPINDLE_ACTIVITY"  # the folder in which ranks record what they are doing
RECORD_S = "SPINDLE_RECORD_S"  # seconds between two of these records
LISTENING = "SPINDLE_LISTENING"  # the descriptor of a socket that listens on MASTER_PORT; empty except on rank 0
PLAN = "SPINDLE_PLAN"  # files of the plan and the profile that a scheduler has for this start of the job
PLAN_PROFILE = "SPINDLE_PLAN_PROFILE"
WORKLOAD_REPORT = "SPINDLE_WORKLOAD_REPORT"  # the file to which rank 0 writes what it trains, for a scheduler
STANDBY = "SPINDLE_STANDBY"  # a folder: the rank is on standby, and begins when it is told to in this folder
# The number of this start of the job, counted from 1 by its scheduler; only the newest start commits checkpoints.
ATTEMPT = "SPINDLE_ATTEMPT"
MEMORY = "SPINDLE_MEMORY"  # a folder in memory that outlives ranks, for checkpoints
SECRET = "SPINDLE_SECRET"  # the key with which ranks sign pickled messages; under torchrun the user sets it
