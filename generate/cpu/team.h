// How a C file of the engine gives work to the threads of team.c: it includes this header, and generate/cpu/team.py
// passes it the team after loading it. Until then, and where there is one thread, the caller does all the work.
#pragma once
#include <stdint.h>

// Items first up to last of a job, done by the worker of that number.
typedef void (*job_fn)(void *job, int64_t first, int64_t last, int worker);
// Does all items 0..n-1, `grain` at a time, with at most `size` workers, whose numbers are below that. Each does its own
// share, in order, then what is left of the others'. Returns when all are done.
typedef void (*team_fn)(job_fn work, void *job, int64_t n, int64_t grain, int size);

static inline int64_t share_end(int64_t n, int worker, int size) { return n * (worker + 1) / size; }

static team_fn run_shared;
static int workers = 1;

// For a job that has memory for `size` workers, taken from `workers` once: others may change that at any time.
static inline void share_among(int size, job_fn work, void *job, int64_t n, int64_t grain) {
  if (size > 1) run_shared(work, job, n, grain, size);
  else if (n > 0) work(job, 0, n, 0);
}

static inline void share_out(job_fn work, void *job, int64_t n, int64_t grain) {
  share_among(workers, work, job, n, grain);
}

void use_team(team_fn team, int size) {
  if (size > 1) run_shared = team;
  workers = size > 1 ? size : 1;
}
