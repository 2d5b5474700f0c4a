export default { esbuild: { jsx: 'automatic' }, build: { target: 'esnext', chunkSizeWarningLimit: 20000 } };
