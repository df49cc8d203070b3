/* NCCL's calls that torch 2.13 links to and NCCL 2.28 lacks. One GPU never makes them: each returns ncclInternalError.
   visit.py builds and preloads it where the machine's NCCL is too old: cc -shared -fPIC -o nccl_shim.so nccl_shim.c */
#define FAILS(name) int name(void) { return 3; }
FAILS(ncclCommMemStats)
FAILS(ncclCommResume)
FAILS(ncclCommSuspend)
FAILS(ncclGetLsaMultimemDevicePointer)
FAILS(ncclGetPeerDevicePointer)
FAILS(ncclPutSignal)
FAILS(ncclSignal)
FAILS(ncclWaitSignal)
