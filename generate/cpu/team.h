// How a C file of the engine gives work to the threads of team.c: it includes this header, and generate/cpu/team.py
// passes it the team after loading it. Until then, and where there is one thread, the caller does all the work.
#pragma once
#include <stdint.h>

// Items first up to last of a job, done by the worker of that number.
typedef void (*job_fn)(void *job, int64_t first, int64_t last, int worker);
// Does all items 0..n-1, `grain` at a time: each worker its own share from share_end(n, worker - 1, workers) on, in
// order, then what is left of the others'. Returns when all are done.
typedef void (*team_fn)(job_fn work, void *job, int64_t n, int64_t grain);

static inline int64_t share_end(int64_t n, int worker, int size) { return n * (worker + 1) / size; }

static void alone(job_fn work, void *job, int64_t n, int64_t grain) {
  (void)grain;
  if (n > 0) work(job, 0, n, 0);
}

static team_fn share_out = alone;
static int workers = 1;  // worker numbers are below it

void use_team(team_fn team, int size) {
  share_out = size > 1 ? team : alone;
  workers = size > 1 ? size : 1;
}
