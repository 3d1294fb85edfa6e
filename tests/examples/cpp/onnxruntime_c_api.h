// What examples/cpp/train.cc calls of ONNX Runtime's C API, at its places in the library's table: of
// the packages that the tests install none has the library's own header.

#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17

struct OrtAllocator;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtValue;

enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
};
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_FATAL = 4 };
enum OrtAllocatorType { OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };

struct OrtApi {
  void* unused_0[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char*, OrtEnv**);
  void* unused_4[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**);
  void* unused_8[1];
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*,
                    size_t, const char* const*, size_t, OrtValue**);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  void* unused_11[13];
  OrtStatus* (*SetIntraOpNumThreads)(OrtSessionOptions*, int);
  void* unused_25[5];
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
  OrtStatus* (*SessionGetOutputCount)(const OrtSession*, size_t*);
  void* unused_32[4];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  void* unused_38[11];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t, const int64_t*,
                                               size_t, ONNXTensorElementDataType, OrtValue**);
  void* unused_50[1];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  void* unused_52[17];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* unused_70[8];
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* unused_79[17];
  void (*ReleaseValue)(OrtValue*);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t);
  const char* (*GetVersionString)();
};

extern "C" const OrtApiBase* OrtGetApiBase();
