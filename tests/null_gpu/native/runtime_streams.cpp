// libcudart.so.13: streams, events, capture and graphs.
#include "core.h"
#include "runtime.h"

extern "C" {
// ---- streams and events

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return give(stream, (cudaStream_t)ng_stream_create(0, 0)); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return give(stream, (cudaStream_t)ng_stream_create(flags, 0));
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return give(stream, (cudaStream_t)ng_stream_create(flags, priority));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return result(ng_stream_destroy(stream)); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Stream* known = ng_stream(stream);
  return known ? give(priority, known->priority) : result(INVALID_HANDLE);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return result(ng_stream_synchronize(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return result(ng_stream_query(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return result(ng_stream_wait(stream, (Event*)event));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return give(event, (cudaEvent_t)ng_event_create(0)); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return give(event, (cudaEvent_t)ng_event_create(flags));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result(ng_event_record((Event*)event, stream));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return result(ng_event_record((Event*)event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return result(ng_event_query((Event*)event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return result(ng_event_synchronize((Event*)event)); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return give(ms, ng_elapsed_ms((Event*)begin, (Event*)end));
}

// ---- capture

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return result(ng_exchange_mode((int*)mode));
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return result(ng_begin_capture(stream, mode, nullptr));
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t*,
                                          const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return result(ng_begin_capture(stream, mode, (Graph*)graph));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  return result(ng_end_capture(stream, (Graph**)graph));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return result(ng_capture_info(stream, (int*)status, 0, 0, 0, 0));
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  give(count, 0);
  give(edges, nullptr);
  return result(ng_capture_info(stream, (int*)status, (uint64_t*)id, (Graph**)graph, (Node***)nodes, count));
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes, const cudaGraphEdgeData*,
                                                size_t count, unsigned flags) {
  bool replaces = flags == cudaStreamSetCaptureDependencies;
  return result(ng_set_dependencies(stream, (Node**)nodes, count, replaces));
}

// ---- graphs

cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }  // its nodes live on in the executable graph
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  COUNT("graph.instantiate");
  return give(executable, (cudaGraphExec_t) new Graph(*(Graph*)graph));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return result(ng_graph_launch((Graph*)executable, stream));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete (Graph*)executable;
  return cudaSuccess;
}
static cudaError_t list(const std::vector<Node*>& nodes, cudaGraphNode_t* out, size_t* count) {
  for (size_t i = 0; out && i < *count && i < nodes.size(); i++) out[i] = (cudaGraphNode_t)nodes[i];
  return give(count, nodes.size());
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* out, size_t* count) {
  return list(((Graph*)graph)->nodes, out, count);
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* out, cudaGraphEdgeData*,
                                         size_t* count) {
  return list(((Node*)node)->dependencies, out, count);
}
cudaError_t cudaGraphAddNode(cudaGraphNode_t* out, cudaGraph_t graph, const cudaGraphNode_t* dependencies,
                             const cudaGraphEdgeData*, size_t count, cudaGraphNodeParams*) {
  auto* node = new Node{OTHER_NODE, "added node", 0};
  for (size_t i = 0; i < count; i++) {
    auto* dependency = (Node*)dependencies[i];
    node->dependencies.push_back(dependency);
    dependency->num_children++;
  }
  ((Graph*)graph)->nodes.push_back(node);
  return give(out, (cudaGraphNode_t)node);
}
}
